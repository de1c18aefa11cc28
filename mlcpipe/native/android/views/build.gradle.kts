plugins {
    id("com.android.application")
    id("org.jetbrains.kotlin.android")
}

android {
    namespace = "com.example.views"
    defaultConfig { applicationId = "com.example.views" }
    packaging { jniLibs { useLegacyPackaging = true } } // compressed, and unpacked when the app is installed
    kotlinOptions { jvmTarget = "1.8" }
}

dependencies { implementation(project(":mlcpipe")) }
