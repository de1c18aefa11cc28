plugins {
    id("com.android.application")
    id("org.jetbrains.kotlin.android")
    id("org.jetbrains.kotlin.plugin.compose")
}

android {
    namespace = "com.example.chat"
    defaultConfig { applicationId = "com.example.chat" }
    buildFeatures { compose = true }
    kotlinOptions { jvmTarget = "1.8" }
}

dependencies {
    implementation(project(":mlcpipe"))
    implementation(platform("androidx.compose:compose-bom:2024.12.01"))
    implementation("androidx.compose.material3:material3")
    implementation("androidx.activity:activity-compose:1.9.3")
}
